"""How the ranks of a job find each other, and exchange their first bytes."""
