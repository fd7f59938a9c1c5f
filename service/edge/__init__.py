"""What stands between the network and the routes: who may speak, how much, how often, for how long, over TLS."""
