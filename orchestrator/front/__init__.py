"""Where clients come in: gRPC and HTTP, who is let in and how much, and what makes a request admissible."""
