"""The status page: server-rendered, one style sheet, no build."""
