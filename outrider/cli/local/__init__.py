"""Services of one machine, started together: `outrider up` and `outrider demo`."""
