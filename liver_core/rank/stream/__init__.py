"""While training goes on: state streams into the next world and is certified there."""
