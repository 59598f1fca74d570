// out[row] = sum of x[row]², one block a row. x: [rows, n]. Launch: <<<rows, 128>>>
extern "C" __global__ void row_squares(float *out, const float *x, int n) {
    __shared__ float sums[4];
    int thread = threadIdx.x;
    float part = 0.0f;
    for (int i = thread; i < n; i += 128) {
        float value = x[blockIdx.x * n + i];
        part += value * value;
    }
    for (int distance = 16; distance > 0; distance /= 2)
        part += __shfl_xor_sync(0xffffffffu, part, distance);
    if (thread % 32 == 0)
        sums[thread / 32] = part;
    __syncthreads();
    if (thread == 0)
        out[blockIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
