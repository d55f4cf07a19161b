"""The command line: `outrider` starts services, asks them, measures them. Standard output is data."""
