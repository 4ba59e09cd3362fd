"""Which combination to take on this cluster: the candidates, their race, and the answer."""
