"""Readers of your own files and of published datasets, without torch.

A dataset is read once, in four steps::

    Declaration -> reader -> Reading -> checks, split, facts -> Dataset
    dataset.py     image_folder.py, table.py, ...  arrays.py    dataset.py

1. A :class:`~dpmac_cli.data.dataset.Declaration` holds what is public: settings and the schema of a
   table. No record can change it.
2. The reader of its kind (``reader.py`` has the registry) returns arrays in a
   :class:`~dpmac_cli.data.reader.Reading`, the same for training and for new records to predict.
3. ``arrays.py`` checks them (``array_faults.py``, ``targets.py``), holds some records out
   (``held_out.py``), and clips numbers to their ranges (``layout.py``).
4. A :class:`~dpmac_cli.data.dataset.Dataset` has the records, public facts, and private notes.

Two rules hold everywhere. **Each record is read by itself**: what it becomes, on which side of the
split it is, and which unit it has depend on that record and on declarations, so adding or removing
another one changes nothing of it. **What depends on records is private or named**: it is in the
notes for the person who holds them, or ``facts.inferred`` says that it was read from them.
"""
