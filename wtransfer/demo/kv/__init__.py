"""The demo's other story: KV cache from a prefill to a decode instance, and what that saves."""
