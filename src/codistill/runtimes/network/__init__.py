"""The same protocols between machines: certificates, links over Zenoh, hub, agents and peers."""
