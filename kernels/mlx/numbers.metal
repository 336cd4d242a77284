// Rounding of float32 results to the dtype of an output, to nearest even.

template <typename T>
inline float largest() {
  return INFINITY;
}

template <>
inline float largest<half>() {
  return 65504.0f;
}

template <>
inline float largest<bfloat16_t>() {
  return 3.3895313892515355e38f;
}

// x in T; a finite number beyond its range becomes its largest number
template <typename T>
inline T saturated(float x) {
  const float most = largest<T>();
  return T(metal::isinf(x) || metal::isnan(x) ? x : (x > most ? most : (x < -most ? -most : x)));
}
