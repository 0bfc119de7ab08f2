/* A watched run's page updates by itself, but not while it is not visible. */
(function () {
  "use strict";

  document.addEventListener("visibilitychange", () => {
    if (document.getElementById("watch-live")) {
      window.dash_clientside.set_props("watch-tick", { disabled: document.hidden });
    }
  });
})();
