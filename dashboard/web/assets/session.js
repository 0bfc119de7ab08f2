/* A session that has ended: the next request of an open page leads to the login page. */
(function () {
  "use strict";

  const send = window.fetch;

  window.fetch = async function (...request) {
    const answer = await send.apply(window, request);
    if (answer.status === 401) {
      const place = location.pathname + location.search;
      location.assign("/login?next=" + encodeURIComponent(place));
    }
    return answer;
  };

  /* A page that the browser has kept and shows again after the log-out. */
  window.addEventListener("pageshow", (event) => {
    if (event.persisted && document.getElementById("log-out")) location.reload();
  });
})();
