"""`python -m trainer.export DIR format=onnx`: a trained model for other programs."""
