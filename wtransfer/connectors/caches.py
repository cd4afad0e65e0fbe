"""The form of a layer's page, for `wtransfer.connectors.storage`; it is in `kv.cache_view`."""

from wtransfer.kv.cache_view import page_form

__all__ = ["page_form"]
