/* The button that deletes a run, after a question; the list of runs follows. */
(function () {
  "use strict";

  async function remove(button) {
    const question = "Delete " + button.dataset.name + " with its files and its report?";
    if (!window.confirm(question)) return;
    button.disabled = true;
    try {
      const answer = await fetch("/api/v1/runs/" + button.dataset.delete, { method: "DELETE" });
      if (!answer.ok && answer.status !== 404) throw new Error((await answer.json()).error);
      location.assign("/");
    } catch (error) {
      button.disabled = false;
      window.alert("The run was not deleted: " + error.message);
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("[data-delete]");
    if (button) remove(button);
  });
})();
