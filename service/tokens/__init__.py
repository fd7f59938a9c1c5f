"""Bearer tokens: who may call which surface."""
