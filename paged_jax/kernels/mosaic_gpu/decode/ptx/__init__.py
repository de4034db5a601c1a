"""What Pallas's interpreter cannot run. The tests replace these functions."""
