"""The web console: static files that a browser runs as a client of the API, and the page /docs."""
