"""Everything that records what an engine did: ring, collector, trace lake, traffic mirror."""
