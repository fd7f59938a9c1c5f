"""Browser sessions: a cookie that stands for a token, so that the token itself is not kept in the browser."""
