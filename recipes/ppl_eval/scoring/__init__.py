"""From a batch to the NLL of its tokens: the loaded model, its head, several batches at once."""
