"""The chapters' model at full speed and full safety."""
