"""A worker behind HTTP, and how it is called: routes, limits, one request."""
