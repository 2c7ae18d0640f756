"""scheduler-bench: a load test for LLM inference services that audits itself."""

__version__ = "0.1.0"
