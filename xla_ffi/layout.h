// A bucket's layout as a handler receives it, checked, and cut into chunks of work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/pieces.h"
#include "ffi_helpers.h"

namespace sfpo {

// Some rows of one piece, or of the padding of a group.
struct Chunk {
  const Piece* piece;  // null: padding
  int64_t group;
  int64_t row;
  int64_t rows;
};

// Where in its leaf a row of a piece begins, and how many entries are meant.
struct RowSpan {
  int64_t start;
  int64_t length;
};

class Layout {
 public:
  // Reads the attributes; `rows` has one scale, or anything of that size, for each row of each
  // group. What does not fit `leaves` is an error of `buffers`, and so are rows between pieces
  // that none fills, or that two fill: nobody would write them, or two threads at once.
  template <typename T, typename R>
  Layout(ffi::Span<const int64_t> fields, ffi::Span<const int64_t> widths, const Views<T>& leaves,
         const Views<R>& rows, Buffers* buffers) {
    buffers->require(widths.size() == rows.size(), "`widths` must have one of each group");
    if (widths.size() != rows.size()) return;
    for (size_t i = 0; i < widths.size(); ++i) {
      groups_.push_back({widths[i], rows[i].size});
      buffers->require(widths[i] > 0 && widths[i] % 8 == 0, "`widths` must be multiples of 8");
    }
    buffers->require(fields.size() % kPieceFields == 0, "`pieces` has a torn piece");
    std::vector<int64_t> filled(widths.size(), 0);
    for (size_t i = 0; i + kPieceFields <= fields.size(); i += kPieceFields) {
      Piece piece{fields[i], fields[i + 1], fields[i + 2], fields[i + 3], fields[i + 4]};
      bool is_known = 0 <= piece.leaf && piece.leaf < static_cast<int64_t>(leaves.size()) &&
                      0 <= piece.group && piece.group < static_cast<int64_t>(groups_.size());
      buffers->require(is_known, "`pieces` names a leaf or group that is not there");
      if (!is_known || groups_[piece.group].width <= 0) return;
      buffers->require(is_within(piece.start, piece.length, leaves[piece.leaf].size),
                       "`pieces` reaches beyond its leaf");
      const Group& group = groups_[piece.group];
      buffers->require(is_within(piece.row, rows_of(piece), group.rows),
                       "`pieces` reaches beyond its group");
      buffers->require(piece.row == filled[piece.group], "`pieces` must fill rows in order");
      filled[piece.group] = piece.row + rows_of(piece);
      pieces_.push_back(piece);
    }
  }

  // Requires each entry of each leaf to be in one piece, for the same two reasons.
  template <typename T>
  void require_all(const Views<T>& leaves, Buffers* buffers) const {
    std::vector<Piece> pieces = pieces_;
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
      return a.leaf != b.leaf ? a.leaf < b.leaf : a.start < b.start;
    });
    std::vector<int64_t> ends(leaves.size(), 0);
    bool is_whole = true;
    for (const Piece& piece : pieces) {
      is_whole = is_whole && piece.start == ends[piece.leaf];
      ends[piece.leaf] = piece.start + piece.length;
    }
    for (size_t i = 0; i < leaves.size(); ++i) is_whole = is_whole && ends[i] == leaves[i].size;
    buffers->require(is_whole, "`pieces` must have each entry of each leaf once");
  }

  int64_t width(int64_t group) const { return groups_[group].width; }

  // Requires one bit for each entry of each group's rows, `ranks` times.
  template <typename T>
  void require_bits(const char* message, const Views<T>& bits, int64_t ranks, Buffers* buffers) {
    for (size_t i = 0; i < bits.size(); ++i) {
      const Group& group = groups_[i];
      buffers->require(is_product(bits[i].size, {ranks, group.rows, group.width / 8}), message);
    }
  }

  // Entries of all rows, padding too.
  int64_t entries() const {
    int64_t sum = 0;
    for (const Group& group : groups_) sum += group.rows * group.width;
    return sum;
  }

  // Chunks of all pieces; with `with_padding` also of the rows that no piece fills. By default
  // they are long enough to be worth a thread's claim, short enough to be shared out evenly.
  std::vector<Chunk> chunks(bool with_padding, int64_t chunk_entries = 1 << 16) const {
    std::vector<Chunk> chunks;
    auto cut = [&](const Piece* piece, int64_t group, int64_t row, int64_t rows) {
      int64_t step = std::max<int64_t>(1, chunk_entries / groups_[group].width);
      for (int64_t end = row + rows; row < end; row += step) {
        chunks.push_back({piece, group, row, std::min(step, end - row)});
      }
    };
    std::vector<int64_t> filled(groups_.size(), 0);
    for (const Piece& piece : pieces_) {
      cut(&piece, piece.group, piece.row, rows_of(piece));
      filled[piece.group] = std::max(filled[piece.group], piece.row + rows_of(piece));
    }
    for (size_t i = 0; with_padding && i < groups_.size(); ++i) {
      cut(nullptr, i, filled[i], groups_[i].rows - filled[i]);
    }
    return chunks;
  }

  RowSpan span(const Piece& piece, int64_t row) const {
    RowSpan all = rest(piece, row);
    return {all.start, std::min(width(piece.group), all.length)};
  }

  // The same of `row` and all rows of the piece after it.
  RowSpan rest(const Piece& piece, int64_t row) const {
    int64_t offset = (row - piece.row) * width(piece.group);
    return {piece.start + offset, piece.length - offset};
  }

 private:
  struct Group {
    int64_t width;
    int64_t rows;
  };

  static bool is_within(int64_t start, int64_t length, int64_t size) {
    return start >= 0 && length > 0 && start <= size && length <= size - start;
  }

  int64_t rows_of(const Piece& piece) const {
    int64_t width = groups_[piece.group].width;
    return piece.length / width + (piece.length % width != 0);
  }

  std::vector<Group> groups_;
  std::vector<Piece> pieces_;
};

}  // namespace sfpo
