"""Fleets: the reachable clients. One simulated fleet, several engines that run its clients' work."""
