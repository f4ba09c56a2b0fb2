// Pieces of a training step as CUDA graphs: the work that a thread puts on a stream is recorded instead of run.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

namespace distopt {

// Recorded work, ready to be launched any number of times, with the addresses that it was recorded with.
class GraphPiece {
 public:
  // Throws if the work has a copy from or to host memory, or calls the host: its replay would use old values.
  explicit GraphPiece(cudaGraph_t graph);
  ~GraphPiece();
  GraphPiece(const GraphPiece&) = delete;
  GraphPiece& operator=(const GraphPiece&) = delete;

  void launch(cudaStream_t stream) const;
  std::size_t nodes() const { return nodes_; }

 private:
  cudaGraphExec_t executable_ = nullptr;  // null: no work at all
  std::size_t nodes_ = 0;
};

// From here on `stream`, non-blocking and not a default stream, records. Mode "thread local": calls of this
// thread that might wait for the device fail, while other threads, such as the one that polls NCCL, may make them.
void begin_capture(cudaStream_t stream);

// The work since `begin_capture`. Throws if the recording has failed; the stream is as before it either way.
std::unique_ptr<GraphPiece> end_capture(cudaStream_t stream);

// Drops a recording in any state. None of its work was run.
void abort_capture(cudaStream_t stream) noexcept;

// Allows a call that is safe within a recording but that "thread local" forbids, such as cudaMalloc.
class Relaxed {
 public:
  Relaxed();
  ~Relaxed();
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace distopt
