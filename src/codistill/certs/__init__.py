"""The certificate authority of a federation."""
