"""The goodput ledger: intervals of slot time, one cause each, chained without gaps."""
