"""Moves frames between workers: loopback, sockets, shared memory, faults, rendezvous."""
