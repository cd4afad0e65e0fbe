"""Weight updates of wtransfer inside SGLang; `wtransfer_sglang.plugin` is what SGLang loads."""
