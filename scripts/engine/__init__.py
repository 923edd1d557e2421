"""The chapters' model, fast and safe."""
