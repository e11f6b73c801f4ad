"""The servers as one Ray Serve application: an ingress that reads requests, replicas that answer, a router between."""
