"""The series' two corpora, and what they are made of."""
