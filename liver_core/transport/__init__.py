"""Moving bytes of training state between rank processes. Import the implementation you want by its module."""
