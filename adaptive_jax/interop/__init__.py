"""Models of other libraries: read fairseq's and AWD-LSTM's, write safetensors and StableHLO."""
