"""The database: engine, embedded server, schema upgrades, wake-ups by NOTIFY."""
