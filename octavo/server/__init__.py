"""HTTP. Knows neither torch nor the scheduler."""
