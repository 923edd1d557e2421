// Says why the page can't work here; if it can, shows its controls, which are hidden at first.
// Plain old JavaScript: it must run where nothing else does.
(function () {
  function trouble() {
    var modules = "noModule" in document.createElement("script");
    if (location.protocol === "file:") {
      return (
        "This page was opened as a file, and a browser doesn't let a file load the model beside it. " +
        "Serve the folder above it instead: run python -m http.server there, then open http://localhost:8000/" +
        location.pathname.split("/").slice(-2)[0] + "/ here."
      );
    }
    if (!modules) {
      return "This browser is too old for the page: it doesn't know JavaScript modules. Any browser of recent years does.";
    }
    var plain = document.documentElement.hasAttribute("data-plain"); // it computes in JavaScript
    if (typeof WebAssembly !== "object" && !plain) {
      return (
        "This browser has no WebAssembly, or it is switched off (some browsers do this in a strict security mode). " +
        "The model computes with it, so nothing can be translated here."
      );
    }
    return "";
  }

  var message = trouble();
  if (!message) {
    document.documentElement.className = "";
    window.addEventListener("load", function () {
      if (document.documentElement.getAttribute("data-state")) return; // app.js runs
      document.documentElement.className = "broken";
      document.getElementById("trouble").textContent =
        "The page's script didn't run: it could not be loaded, or this browser is too old. " +
        "Load the page again, or try another browser.";
    });
    return;
  }
  document.addEventListener("DOMContentLoaded", function () {
    document.getElementById("trouble").textContent = message;
  });
})();
