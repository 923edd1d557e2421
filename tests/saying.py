"""What a chapter's script doesn't get when it runs headless: a display, the corpus, a network."""

HIDDEN = ("DISPLAY", "WAYLAND_DISPLAY", "MULTI30K_DIR", "RANK")
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
