"""What a run needs: settings, data, a model, its training and its scores."""
