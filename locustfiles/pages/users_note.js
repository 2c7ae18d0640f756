"use strict";
// One line below Locust's field "Number of users", wherever its form shows that field.
(() => {
  function put() {
    for (const field of document.querySelectorAll("[name=userCount]")) {
      const box = field.closest(".MuiFormControl-root") || field.parentElement;
      if (box.querySelector(".bench-users-note")) continue;
      const note = document.createElement("p");
      note.className = "bench-users-note";
      note.id = "bench-users-note";
      note.style.cssText = "margin:4px 14px 0;font-size:.8rem;opacity:.8";
      note.textContent = TEXT;
      box.append(note);
      field.setAttribute("aria-describedby", note.id);
    }
  }
  new MutationObserver(put).observe(document.body, { childList: true, subtree: true });
  put();
})();
