"""What users ask about their programs: explain, cost, launches, export's checks; and what times programs."""
