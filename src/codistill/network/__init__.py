"""The same protocols between machines: certificates, links with mutual TLS, hub, agents and peers."""
