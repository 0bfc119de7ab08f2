/* Scans a block of a trace: a JSON array of entries -> the fields of its complete events as columns.

   Only what profilers write is scanned: ASCII, names without escapes, plain numbers, no key twice. At
   anything else, damaged text included, scan() gives None, and the caller decodes the block as without
   this module. So it never corrects or rejects anything, and what it accepts means the same to both.

   Every read is before the end of the text; offsets have 32 bits, and longer texts are not scanned. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define VERSION 1 /* as in scanned_block.py: another one whenever what scan() gives changes */
#define MAX_DEPTH 32
#define MAX_PROBES 256 /* of a name in its table: texts that are made to collide are not scanned */
#define MAX_US (((int64_t)1 << 61) / 1000)

typedef struct {
    int32_t begin, end;
} Span;

/* One complete event. Ids are of the tables of distinct texts; -1: none. */
typedef struct {
    int64_t start_ns, dur_ns, correlation, sequence;
    Span args;
    int32_t name, category, thread, place, grid, dims, short_type, names_collective;
} Event;

typedef struct {
    char *data;
    size_t size, room;
} Buffer;

/* Distinct keys, numbered in order of appearance: spans of the text, or pairs of numbers. */
typedef struct {
    Buffer keys, hashes;
    int32_t *slots;
    size_t slot_count, count;
} Table;

enum { NAMES, CATEGORIES, IDS, GRIDS, DIMS, THREADS, PLACES, TABLES };

typedef struct {
    const unsigned char *text, *at, *end;
    Table tables[TABLES];
    Buffer events, metadata;
    Py_ssize_t entries, asynchronous, paired;
    int dims_tokens, short_types; /* strings of these arguments so far */
} Scanner;

typedef struct {
    int64_t first, second;
} Pair;

/* Values of the arguments of an entry that are read; odd if one is not plain. */
typedef struct {
    int64_t correlation, sequence, stream, device;
    Span grid, dims;
    unsigned seen;
    bool names_collective, has_short_types, odd;
} Arguments;

static bool append(Buffer *buffer, const void *bytes, size_t size)
{
    if (buffer->room - buffer->size < size) {
        size_t room = 2 * buffer->room + size + 4096;
        char *data = PyMem_Realloc(buffer->data, room);
        if (data == NULL) {
            PyErr_NoMemory();
            return false;
        }
        buffer->data = data;
        buffer->room = room;
    }
    memcpy(buffer->data + buffer->size, bytes, size);
    buffer->size += size;
    return true;
}

/* Tables. */

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

static bool widen(Table *table)
{
    size_t count = table->slot_count ? 4 * table->slot_count : 256;
    int32_t *slots = PyMem_Malloc(count * sizeof *slots);
    if (slots == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memset(slots, -1, count * sizeof *slots);
    const uint64_t *hashes = (const uint64_t *)table->hashes.data;
    for (size_t id = 0; id < table->count; id++) {
        size_t slot = hashes[id] & (count - 1);
        while (slots[slot] >= 0)
            slot = (slot + 1) & (count - 1);
        slots[slot] = (int32_t)id;
    }
    PyMem_Free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    return true;
}

static bool add_key(Table *table, uint64_t hash, size_t slot, const void *key, size_t size, int32_t *id)
{
    if (!append(&table->keys, key, size) || !append(&table->hashes, &hash, sizeof hash))
        return false;
    *id = table->slots[slot] = (int32_t)table->count++;
    return true;
}

static bool number_text(Scanner *s, int which, Span key, int32_t *id)
{
    Table *table = &s->tables[which];
    size_t length = (size_t)(key.end - key.begin), left = length;
    const unsigned char *bytes = s->text + key.begin;
    uint64_t hash = length, word;
    for (; left >= 8; left -= 8, bytes += 8) {
        memcpy(&word, bytes, 8);
        hash = mix(hash, word);
    }
    word = 0;
    memcpy(&word, bytes, left);
    hash = mix(hash, word);
    if (2 * table->count >= table->slot_count && !widen(table))
        return false;
    size_t slot = hash & (table->slot_count - 1);
    for (int probe = 0; probe < MAX_PROBES; probe++) {
        int32_t found = table->slots[slot];
        if (found < 0)
            return add_key(table, hash, slot, &key, sizeof key, id);
        Span other = ((const Span *)table->keys.data)[found];
        if (((const uint64_t *)table->hashes.data)[found] == hash &&
            (size_t)(other.end - other.begin) == length &&
            memcmp(s->text + other.begin, s->text + key.begin, length) == 0) {
            *id = found;
            return true;
        }
        slot = (slot + 1) & (table->slot_count - 1);
    }
    return false;
}

static bool number_pair(Scanner *s, int which, Pair key, int32_t *id)
{
    Table *table = &s->tables[which];
    uint64_t hash = mix(mix(0, (uint64_t)key.first), (uint64_t)key.second);
    if (2 * table->count >= table->slot_count && !widen(table))
        return false;
    size_t slot = hash & (table->slot_count - 1);
    for (int probe = 0; probe < MAX_PROBES; probe++) {
        int32_t found = table->slots[slot];
        if (found < 0)
            return add_key(table, hash, slot, &key, sizeof key, id);
        Pair other = ((const Pair *)table->keys.data)[found];
        if (other.first == key.first && other.second == key.second) {
            *id = found;
            return true;
        }
        slot = (slot + 1) & (table->slot_count - 1);
    }
    return false;
}

/* JSON. What returns false met something that is not plain. */

static void skip_space(Scanner *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\r' || *s->at == '\t'))
        s->at++;
}

static bool skip_char(Scanner *s, unsigned char wanted)
{
    if (s->at == s->end || *s->at != wanted)
        return false;
    s->at++;
    return true;
}

static Span span_from(const Scanner *s, const unsigned char *begin)
{
    Span span = {(int32_t)(begin - s->text), (int32_t)(s->at - s->text)};
    return span;
}

static bool begins_with(const Scanner *s, Span span, const char *text, int32_t length)
{
    return span.end - span.begin >= length && memcmp(s->text + span.begin, text, (size_t)length) == 0;
}

#define BEGINS_WITH(s, span, text) begins_with(s, span, text, sizeof text - 1)
#define IS_TEXT(s, span, text) ((span).end - (span).begin == sizeof text - 1 && BEGINS_WITH(s, span, text))

/* Skips ASCII up to a quote, a backslash or a control character, eight bytes at once if possible. */
static void skip_plain(Scanner *s)
{
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const uint64_t ones = 0x0101010101010101u;
    for (; s->end - s->at >= 8; s->at += 8) {
        uint64_t word;
        memcpy(&word, s->at, 8);
        uint64_t quote = word ^ ones * '"', backslash = word ^ ones * '\\';
        /* The lowest top bit is of the first such byte: what is subtracted is borrowed from above. */
        uint64_t found = (((quote - ones) & ~quote) | ((backslash - ones) & ~backslash) | (word - ones * ' ') | word);
        found &= ones << 7;
        if (found) {
            s->at += __builtin_ctzll(found) >> 3;
            return;
        }
    }
#endif
    while (s->at < s->end && *s->at >= ' ' && *s->at < 0x80 && *s->at != '"' && *s->at != '\\')
        s->at++;
}

/* A string; content is what is between its quotes. Escaped quotes are not plain: the search for shapes
   in the text of arguments, which Python does, may take them for others. */
static bool skip_string(Scanner *s, Span *content, bool *escaped)
{
    *escaped = false;
    if (!skip_char(s, '"'))
        return false;
    const unsigned char *begin = s->at;
    for (;;) {
        skip_plain(s);
        if (s->at == s->end)
            return false;
        if (*s->at == '"')
            break;
        if (*s->at != '\\' || s->end - s->at < 2 || !s->at[1] || strchr("\\/bfnrt", s->at[1]) == NULL)
            return false;
        *escaped = true;
        s->at += 2;
    }
    *content = span_from(s, begin);
    s->at++;
    return true;
}

static bool is_digit(const Scanner *s)
{
    return s->at < s->end && *s->at >= '0' && *s->at <= '9';
}

static bool skip_digits(Scanner *s)
{
    if (!is_digit(s))
        return false;
    while (is_digit(s))
        s->at++;
    return true;
}

static bool skip_number(Scanner *s)
{
    skip_char(s, '-');
    if (!skip_char(s, '0') && !skip_digits(s))
        return false;
    if (skip_char(s, '.') && !skip_digits(s))
        return false;
    if (skip_char(s, 'e') || skip_char(s, 'E')) {
        if (!skip_char(s, '-'))
            skip_char(s, '+');
        return skip_digits(s);
    }
    return true;
}

static bool skip_word(Scanner *s, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(s->end - s->at) < length || memcmp(s->at, word, length) != 0)
        return false;
    s->at += length;
    return true;
}

/* The key of a member and the colon. */
static bool skip_key(Scanner *s, Span *key, bool *escaped)
{
    if (!skip_string(s, key, escaped))
        return false;
    skip_space(s);
    if (!skip_char(s, ':'))
        return false;
    skip_space(s);
    return true;
}

/* What follows a member or an item: whether it is another one. */
static bool skip_comma(Scanner *s, unsigned char close, bool *more)
{
    skip_space(s);
    *more = skip_char(s, ',');
    if (!*more)
        return skip_char(s, close);
    skip_space(s);
    return true;
}

static bool skip_value(Scanner *s, int depth)
{
    Span content;
    bool escaped, more;
    if (s->at == s->end || depth > MAX_DEPTH)
        return false;
    switch (*s->at) {
    case '"':
        if (!skip_string(s, &content, &escaped))
            return false;
        s->dims_tokens += IS_TEXT(s, content, "Input Dims");
        s->short_types |= BEGINS_WITH(s, content, "c10::");
        return true;
    case '{':
        s->at++;
        skip_space(s);
        for (more = !skip_char(s, '}'); more;) {
            if (!skip_key(s, &content, &escaped))
                return false;
            s->dims_tokens += IS_TEXT(s, content, "Input Dims");
            s->short_types |= BEGINS_WITH(s, content, "c10::");
            if (!skip_value(s, depth + 1) || !skip_comma(s, '}', &more))
                return false;
        }
        return true;
    case '[':
        s->at++;
        skip_space(s);
        for (more = !skip_char(s, ']'); more;)
            if (!skip_value(s, depth + 1) || !skip_comma(s, ']', &more))
                return false;
        return true;
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    default:
        return skip_number(s);
    }
}

/* An integer of at most 18 digits. */
static bool read_integer(const Scanner *s, Span span, int64_t *value)
{
    const unsigned char *at = s->text + span.begin, *end = s->text + span.end;
    bool negative = at < end && *at == '-';
    int64_t number = 0;
    at += negative;
    if (at == end || end - at > 18)
        return false;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9')
            return false;
        number = 10 * number + (*at - '0');
    }
    *value = negative ? -number : number;
    return true;
}

/* One that is ignored if 32 bits cannot hold it: some profilers write 4294967295 for none. */
static bool read_narrow(const Scanner *s, Span span, int64_t *value)
{
    int64_t number;
    if (!read_integer(s, span, &number))
        return false;
    if (INT32_MIN <= number && number <= INT32_MAX)
        *value = number;
    return true;
}

/* Microseconds in ns, rounded half to even. */
static bool read_time(const Scanner *s, Span span, int64_t *ns)
{
    const unsigned char *at = s->text + span.begin, *end = s->text + span.end;
    bool negative = at < end && *at == '-';
    int64_t whole = 0, decimals = 0, below = 1;
    at += negative;
    const unsigned char *begin = at;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        if (at - begin == 16)
            return false;
        whole = 10 * whole + (*at - '0');
    }
    if (at == begin || whole >= MAX_US)
        return false;
    whole *= 1000;
    if (at < end) {
        int count = 0;
        if (*at++ != '.')
            return false;
        for (; at < end && *at >= '0' && *at <= '9'; at++, count++) {
            if (count == 15)
                return false;
            decimals = 10 * decimals + (*at - '0');
            below *= count < 3 ? 1 : 10;
        }
        /* Python's Decimal, which reads the negative ones, rounds products to 28 digits. */
        if (at < end || count == 0 || (negative && count > 9))
            return false;
        for (; count < 3; count++)
            decimals *= 10;
        int64_t rest = 2 * (decimals % below);
        whole += decimals / below;
        whole += rest > below || (rest == below && whole % 2);
    }
    *ns = negative ? -whole : whole;
    return true;
}

/* Whether the value is an array of nothing but these characters, with at most 18 digits in a row. */
static bool is_array_of(const Scanner *s, Span span, const char *chars)
{
    int digits = 0;
    if (span.end - span.begin < 2 || s->text[span.begin] != '[')
        return false;
    for (int32_t i = span.begin + 1; i < span.end - 1; i++) {
        unsigned char byte = s->text[i];
        digits = byte >= '0' && byte <= '9' ? digits + 1 : 0;
        if (!byte || strchr(chars, byte) == NULL || digits > 18)
            return false;
    }
    return true;
}

enum { CORRELATION = 1, STREAM = 2, DEVICE = 4, COLLECTIVE = 8, GRID = 16, SEQUENCE = 32, SHAPES = 64 };

static unsigned find_argument(const Scanner *s, Span key)
{
    switch (key.end - key.begin) {
    case 4:
        return IS_TEXT(s, key, "grid") ? GRID : 0;
    case 6:
        return IS_TEXT(s, key, "stream") ? STREAM : IS_TEXT(s, key, "device") ? DEVICE : 0;
    case 10:
        return IS_TEXT(s, key, "Input Dims") ? SHAPES : 0;
    case 11:
        return IS_TEXT(s, key, "correlation") ? CORRELATION : 0;
    case 15:
        return IS_TEXT(s, key, "Collective name") ? COLLECTIVE : IS_TEXT(s, key, "Sequence number") ? SEQUENCE : 0;
    default:
        return 0;
    }
}

static bool scan_arguments(Scanner *s, Arguments *args)
{
    bool escaped, more;
    s->dims_tokens = s->short_types = 0;
    s->at++;
    skip_space(s);
    for (more = !skip_char(s, '}'); more;) {
        Span key, value;
        if (!skip_key(s, &key, &escaped) || escaped)
            return false;
        s->short_types |= BEGINS_WITH(s, key, "c10::");
        unsigned argument = find_argument(s, key);
        const unsigned char *begin = s->at;
        if (!skip_value(s, 2))
            return false;
        value = span_from(s, begin);
        args->odd |= (args->seen & argument) != 0;
        args->seen |= argument;
        switch (argument) {
        case CORRELATION:
            args->odd |= !read_integer(s, value, &args->correlation);
            break;
        case SEQUENCE:
            args->odd |= !read_integer(s, value, &args->sequence);
            break;
        case STREAM:
            args->odd |= !read_narrow(s, value, &args->stream);
            break;
        case DEVICE:
            args->odd |= !read_narrow(s, value, &args->device);
            break;
        case COLLECTIVE:
            args->names_collective = !IS_TEXT(s, value, "null");
            break;
        case GRID:
            /* Triton writes its formula as a text, which is ignored. */
            args->odd |= *begin != '"' && !is_array_of(s, value, "0123456789, \n\r\t");
            if (*begin == '[')
                args->grid = value;
            break;
        case SHAPES:
            args->odd |= !is_array_of(s, value, "[]0123456789, \n\r\t-");
            args->dims = value;
            break;
        default:
            break;
        }
        if (!skip_comma(s, '}', &more))
            return false;
    }
    args->odd |= s->dims_tokens != 0;
    args->has_short_types = s->short_types;
    return true;
}

static bool contains(const Scanner *s, Span span, const char *text)
{
    size_t length = strlen(text);
    const unsigned char *at = s->text + span.begin, *end = s->text + span.end;
    while ((size_t)(end - at) >= length && (at = memchr(at, text[0], (size_t)(end - at) - length + 1)) != NULL) {
        if (memcmp(at, text, length) == 0)
            return true;
        at++;
    }
    return false;
}

enum { PH, NAME, CAT, PID, TID, TS, DUR, ARGS, FIELDS };

static int find_field(const Scanner *s, Span key)
{
    switch (key.end - key.begin) {
    case 2:
        return IS_TEXT(s, key, "ph") ? PH : IS_TEXT(s, key, "ts") ? TS : FIELDS;
    case 3:
        return IS_TEXT(s, key, "cat")   ? CAT
               : IS_TEXT(s, key, "pid") ? PID
               : IS_TEXT(s, key, "tid") ? TID
               : IS_TEXT(s, key, "dur") ? DUR
                                        : FIELDS;
    case 4:
        return IS_TEXT(s, key, "name") ? NAME : IS_TEXT(s, key, "args") ? ARGS : FIELDS;
    default:
        return FIELDS;
    }
}

/* The content of a field that is a string without escapes. */
static bool read_text(const Scanner *s, Span value, unsigned escapes, int field, Span *content)
{
    if (value.begin == value.end) {
        *content = value;
        return true;
    }
    if (s->text[value.begin] != '"' || escapes >> field & 1)
        return false;
    content->begin = value.begin + 1;
    content->end = value.end - 1;
    return true;
}

/* The id of a process or thread: an integer, or a text, with its quotes; an empty text if missing. */
static bool number_id(Scanner *s, Span value, unsigned escapes, int field, int32_t *id)
{
    int64_t number;
    Span content;
    if (value.begin == value.end || s->text[value.begin] == '"') {
        if (!read_text(s, value, escapes, field, &content))
            return false;
        if (content.begin == content.end)
            value.begin = value.end = 0;
    } else if (!read_integer(s, value, &number) || IS_TEXT(s, value, "-0"))
        return false;
    return number_text(s, IDS, value, id);
}

static bool add_event(Scanner *s, const Span *values, unsigned escapes, Arguments *args)
{
    static const char *const short_types[] = {"c10::Float8", "c10::BFloat16", "c10::Half"};
    Event event = {.correlation = args->correlation, .sequence = args->sequence, .args = values[ARGS],
                   .place = -1, .grid = -1, .dims = -1, .short_type = -1,
                   .names_collective = args->names_collective};
    Span name, category;
    int32_t pid, tid;
    if (args->odd || !read_time(s, values[TS], &event.start_ns))
        return false;
    if (values[DUR].begin != values[DUR].end && !read_time(s, values[DUR], &event.dur_ns))
        return false;
    if (!read_text(s, values[NAME], escapes, NAME, &name) || !number_text(s, NAMES, name, &event.name) ||
        !read_text(s, values[CAT], escapes, CAT, &category) ||
        !number_text(s, CATEGORIES, category, &event.category) ||
        !number_id(s, values[PID], escapes, PID, &pid) || !number_id(s, values[TID], escapes, TID, &tid) ||
        !number_pair(s, THREADS, (Pair){pid, tid}, &event.thread))
        return false;
    if (args->stream >= 0 &&
        !number_pair(s, PLACES, (Pair){event.thread, (int64_t)((uint64_t)args->device << 32 | (uint64_t)args->stream)},
                     &event.place))
        return false;
    if (args->grid.end && !number_text(s, GRIDS, args->grid, &event.grid))
        return false;
    if (args->dims.end) {
        if (!number_text(s, DIMS, args->dims, &event.dims))
            return false;
        for (int type = 0; args->has_short_types && event.short_type < 0 && type < 3; type++)
            if (contains(s, values[ARGS], short_types[type]))
                event.short_type = type;
    }
    return append(&s->events, &event, sizeof event);
}

static bool scan_entry(Scanner *s)
{
    Span values[FIELDS + 1];
    Arguments args = {.correlation = -1, .sequence = -1, .stream = -1, .device = -1};
    unsigned seen = 0, escapes = 0;
    bool more;
    const unsigned char *entry = s->at;
    memset(values, 0, sizeof values);
    if (!skip_char(s, '{'))
        return false;
    skip_space(s);
    for (more = !skip_char(s, '}'); more;) {
        Span key, content;
        bool escaped;
        if (!skip_key(s, &key, &escaped) || escaped)
            return false;
        int field = find_field(s, key);
        const unsigned char *begin = s->at;
        if (begin < s->end && *begin == '"') {
            if (!skip_string(s, &content, &escaped))
                return false;
            escapes |= (unsigned)escaped << field;
        } else if (field == ARGS && begin < s->end && *begin == '{') {
            if (!scan_arguments(s, &args))
                return false;
        } else {
            if (!skip_value(s, 1))
                return false;
            args.odd |= field == ARGS;
        }
        if (field < FIELDS && seen >> field & 1)
            return false;
        seen |= 1u << field;
        values[field] = span_from(s, begin);
        if (!skip_comma(s, '}', &more))
            return false;
    }
    s->entries++;
    Span phase = values[PH];
    if (phase.end - phase.begin != 3 || s->text[phase.begin] != '"' ||
        strchr("XMBEiIstfbenNODPSTFpRcvVaAC(),", s->text[phase.begin + 1]) == NULL)
        return false;
    if (s->text[phase.begin + 1] == 'X')
        return add_event(s, values, escapes, &args);
    if (s->text[phase.begin + 1] == 'M') {
        Span whole = span_from(s, entry);
        return append(&s->metadata, &whole, sizeof whole);
    }
    s->asynchronous += strchr("bne", s->text[phase.begin + 1]) != NULL;
    s->paired += strchr("BE", s->text[phase.begin + 1]) != NULL;
    return true;
}

static bool scan_array(Scanner *s)
{
    bool more;
    skip_space(s);
    if (!skip_char(s, '['))
        return false;
    skip_space(s);
    do {
        if (!scan_entry(s) || !skip_comma(s, ']', &more))
            return false;
    } while (more);
    skip_space(s);
    return s->at == s->end;
}

static PyObject *as_bytes(const Buffer *buffer)
{
    return PyBytes_FromStringAndSize(buffer->data, (Py_ssize_t)buffer->size);
}

static PyObject *scan(PyObject *module, PyObject *text)
{
    (void)module;
    Py_buffer view;
    Scanner s;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(text, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    memset(&s, 0, sizeof s);
    s.text = s.at = view.buf;
    s.end = s.text + view.len;
    if (view.len < INT32_MAX && scan_array(&s))
        result = Py_BuildValue("nnnNNNNNNNNN", s.entries, s.asynchronous, s.paired, as_bytes(&s.events), as_bytes(&s.metadata),
                               as_bytes(&s.tables[NAMES].keys), as_bytes(&s.tables[CATEGORIES].keys),
                               as_bytes(&s.tables[IDS].keys), as_bytes(&s.tables[GRIDS].keys),
                               as_bytes(&s.tables[DIMS].keys), as_bytes(&s.tables[THREADS].keys),
                               as_bytes(&s.tables[PLACES].keys));
    else if (!PyErr_Occurred())
        result = Py_NewRef(Py_None);
    PyMem_Free(s.events.data);
    PyMem_Free(s.metadata.data);
    for (int table = 0; table < TABLES; table++) {
        PyMem_Free(s.tables[table].keys.data);
        PyMem_Free(s.tables[table].hashes.data);
        PyMem_Free(s.tables[table].slots);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_O, "The complete events of a JSON array of entries as columns; None if it is not plain."},
    {NULL, NULL, 0, NULL},
};

static int add_version(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_version}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "event_scanner", .m_size = 0, .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit_event_scanner(void)
{
    return PyModuleDef_Init(&definition);
}
