"""The OpenAI-compatible HTTP API: JSON to the gateway's own words and back. What requests mean is decided elsewhere."""
