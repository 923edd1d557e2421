"""The same model at full speed: training, searching, exporting."""
