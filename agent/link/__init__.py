"""The agent's line to the service: reports up, orders down, and a stream that only wakes. It may be dead for ever."""
