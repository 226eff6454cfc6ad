"""Turns a StepPlan into tokens. Knows neither requests nor policies."""
