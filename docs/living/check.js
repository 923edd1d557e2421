// Says kindly why the page can't work here. Plain old JavaScript: it must run where nothing else does.
(function () {
  function trouble() {
    var modules = "noModule" in document.createElement("script");
    if (location.protocol === "file:") {
      return (
        "This page was opened as a file, and a browser doesn't let a file load the model beside it. " +
        "Serve the folder: run python -m http.server in it, then open http://localhost:8000/ in the browser."
      );
    }
    if (!modules) {
      return "This browser is too old for the page: it doesn't know JavaScript modules. Any browser of the last years does.";
    }
    if (typeof WebAssembly !== "object") {
      return (
        "This browser has no WebAssembly, or it is switched off (some browsers do so in a strict safety mode). " +
        "The model computes with it, so nothing can be translated here. The chapters work without it."
      );
    }
    return "";
  }

  var message = trouble();
  if (!message) return;
  document.documentElement.className += " broken";
  document.addEventListener("DOMContentLoaded", function () {
    document.getElementById("trouble").textContent = message;
    document.getElementById("status").textContent = "Not started.";
  });
})();
