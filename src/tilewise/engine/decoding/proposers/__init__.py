"""Who proposes tokens; each module is one way, for one request at a time, on the host."""
