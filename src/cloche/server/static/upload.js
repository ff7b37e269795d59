// Files of a sandbox: each that is chosen is sent as it is, to the route that writes it.
"use strict";

(() => {
  const form = document.querySelector("form[data-upload]");
  const note = form.querySelector("[role=status]");
  const button = form.querySelector("button");
  button.disabled = false;

  const send = async (file) => {
    const path = `${form.dataset.folder}/${file.name}`;
    const address = `${form.dataset.upload}?${new URLSearchParams({ path })}`;
    const answer = await fetch(address, { method: "PUT", body: file, headers: { "X-CSRF-Token": form.dataset.token } });
    if (answer.ok) return;
    const problem = await answer.json();
    throw new Error([problem.detail, problem.remedy].filter(Boolean).join(". "));
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    let sent = "";
    try {
      for (const file of form.elements.file.files) {
        note.textContent = `${file.name} is being sent.`;
        await send(file);
        sent = file.name;
      }
      location.reload();
    } catch (error) {
      note.textContent = `${error.message || "The service does not answer"}${sent ? ` (sent before it: ${sent})` : ""}`;
      button.disabled = false;
    }
  });
})();
