"""How a chapter looks and runs: charts, records, the first cell, executing notebooks."""
