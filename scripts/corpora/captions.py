"""Fifty captions of our own in the manner of Multi30k, in two languages, aligned by hand.

A line is German | English | links. A link joins a German position and an English one, counted from
0: `3-2` is a sure link, which everyone would draw, and `3p2` a possible one, which some might.
"""

import re
from dataclasses import dataclass

CAPTIONS = """
Ein kleiner Hund läuft über die nasse Wiese . | A small dog runs across the wet meadow . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8
Zwei Mädchen spielen im Garten mit einem roten Ball . | Two girls are playing with a red ball in the garden . | 0-0 1-1 2p2 2-3 3-8 3-9 4-10 5-4 6-5 7-6 8-7 9-11
Im Park sitzt ein alter Mann auf einer Bank . | An old man is sitting on a bench in the park . | 0-8 0-9 1-10 2p3 2-4 3-0 4-1 5-2 6-5 7-6 8-7 9-11
Eine Frau liest ihrem Sohn ein Buch vor . | A woman is reading a book to her son . | 0-0 1-1 2p2 2-3 3p6 3-7 4-8 5-4 6-5 7p3 8-9
Drei Männer in orangen Westen reparieren die Straße . | Three men in orange vests are repairing the road . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9
Ein Junge springt von einem Felsen ins Wasser . | A boy jumps from a rock into the water . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 6-7 7-8 8-9
Der Koch schneidet Gemüse in einer kleinen Küche . | The cook is cutting vegetables in a small kitchen . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9
Eine Gruppe von Wanderern ruht sich im Schatten aus . | A group of hikers is resting in the shade . | 0-0 1-1 2-2 3-3 4p4 4-5 5p5 6-6 6-7 7-8 8p5 9-9
Am Abend füttert ein Mädchen mit Zöpfen die Ziegen . | In the evening a girl with braids feeds the goats . | 0-0 0-1 1-2 2-7 3-3 4-4 5-5 6-6 7-8 8-9 9-10
Ein Radfahrer mit rotem Helm fährt einen steilen Hügel hinauf . | A cyclist with a red helmet is riding up a steep hill . | 0-0 1-1 2-2 3-4 4-5 5p6 5-7 6-9 7-10 8-11 9-8 10-12
Zwei Hunde kämpfen um einen Stock . | Two dogs are fighting over a stick . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7
Ein Kind hat einen großen Schneemann gebaut . | A child has built a big snowman . | 0-0 1-1 2-2 3-4 4-5 5-6 6-3 7-7
Auf dem Markt verkauft eine Frau frisches Obst . | A woman is selling fresh fruit at the market . | 0-6 1-7 2-8 3p2 3-3 4-0 5-1 6-4 7-5 8-9
Ein Mann in einem blauen Hemd streicht einen Zaun . | A man in a blue shirt is painting a fence . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6-7 7-8 8-9 9-10
Kinder rennen durch einen Springbrunnen . | Children are running through a fountain . | 0-0 1p1 1-2 2-3 3-4 4-5 5-6
Die Katze , die auf dem Sofa liegt , schläft . | The cat that is lying on the sofa is sleeping . | 0-0 1-1 3-2 4-5 5-6 6-7 7p3 7-4 9p8 9-9 10-10
Ein Gitarrist mit langen Haaren singt in ein Mikrofon . | A guitarist with long hair is singing into a microphone . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10
Mehrere Leute warten an einer Haltestelle auf den Bus . | Several people are waiting for the bus at a stop . | 0-0 1-1 2p2 2-3 3-7 4-8 5-9 6-4 7-5 8-6 9-10
Ein Fußballspieler in Weiß schießt den Ball ins Tor . | A soccer player in white kicks the ball into the goal . | 0-0 1-1 1-2 2-3 3-4 4-5 5-6 6-7 7-8 7-9 8-10 9-11
Zwei junge Frauen machen ein Foto von sich selbst . | Two young women are taking a picture of themselves . | 0-0 1-1 2-2 3p3 3-4 4-5 5-6 6-7 7-8 8p8 9-9
Ein Traktor zieht einen Wagen voller Heu über das Feld . | A tractor pulls a cart full of hay across the field . | 0-0 1-1 2-2 3-3 4-4 5-5 5p6 6-7 7-8 8-9 9-10 10-11
Bei Regen trägt der Mann einen gelben Mantel . | In the rain the man wears a yellow coat . | 0-0 1-2 2-5 3-3 4-4 5-6 6-7 7-8 8-9
Eine Tänzerin in einem weißen Kleid dreht sich auf der Bühne . | A dancer in a white dress is spinning on the stage . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6-7 7p7 8-8 9-9 10-10 11-11
Der Torwart fängt den Ball mit beiden Händen . | The goalkeeper catches the ball with both hands . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8
Ein schwarzer Hund trägt einen Schuh im Maul . | A black dog is carrying a shoe in its mouth . | 0-0 1-1 2-2 3p3 3-4 4-5 5-6 6-7 6p8 7-9 8-10
Vor dem Haus stehen drei Fahrräder . | Three bicycles are standing in front of the house . | 0-4 0-5 0-6 1-7 2-8 3p2 3-3 4-0 5-1 6-9
Ein Mann schläft auf dem Sofa , während sein Sohn spielt . | A man is sleeping on the sofa while his son is playing . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 7-7 8-8 9-9 10p10 10-11 11-12
Zwei Arbeiter tragen eine schwere Leiter die Treppe hinunter . | Two workers carry a heavy ladder down the stairs . | 0-0 1-1 2-2 3-3 4-4 5-5 6-7 7-8 8-6 9-9
Das Baby hält einen Löffel in der linken Hand . | The baby is holding a spoon in its left hand . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6p7 7-8 8-9 9-10
Eine ältere Dame mit Brille verkauft Blumen auf der Straße . | An older lady with glasses is selling flowers on the street . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10 10-11
Am Strand bauen zwei Jungen eine Burg aus Sand . | Two boys are building a castle of sand on the beach . | 0-8 0-9 1-10 2p2 2-3 3-0 4-1 5-4 6-5 7-6 8-7 9-11
Ein Surfer reitet auf einer großen Welle . | A surfer is riding on a big wave . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8
Eine Frau wäscht ihre Hände in einem Eimer . | A woman is washing her hands in a bucket . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9
Der Lehrer zeigt den Schülern eine Karte von Europa . | The teacher shows the students a map of Europe . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8 9-9
Ein Mann mit Bart und Hut raucht eine Pfeife . | A man with a beard and a hat is smoking a pipe . | 0-0 1-1 2-2 3-4 4-5 5-7 6p8 6-9 7-10 8-11 9-12
Auf der Wiese grasen viele weiße Schafe . | Many white sheep are grazing in the meadow . | 0-5 1-6 2-7 3p3 3-4 4-0 5-1 6-2 7-8
Zwei Kinder rutschen auf ihren Schlitten den Berg hinunter . | Two children are sliding down the mountain on their sleds . | 0-0 1-1 2p2 2-3 3-7 4-8 5-9 6-5 7-6 8-4 9-10
Ein Mädchen bläst die Kerzen auf ihrem Kuchen aus . | A girl blows out the candles on her cake . | 0-0 1-1 2-2 3-4 4-5 5-6 6-7 7-8 8-3 9-9
Der Feuerwehrmann klettert auf eine Leiter . | The firefighter is climbing a ladder . | 0-0 1-1 2p2 2-3 3p3 4-4 5-5 6-6
Ein Straßenmusiker spielt vor einem Café Geige . | A street musician is playing the violin in front of a café . | 0-0 1-1 1-2 2p3 2-4 3-7 3-8 3-9 4-10 5-11 6-6 7-12
Eine Braut und ein Bräutigam tanzen unter bunten Lichtern . | A bride and a groom are dancing under colorful lights . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10
Ein Vogel sitzt auf dem Ast eines kahlen Baumes . | A bird is sitting on the branch of a bare tree . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6p7 6-8 7-9 8-10 9-11
Im Hintergrund sieht man hohe Berge . | In the background one can see tall mountains . | 0-0 0-1 1-2 2p4 2-5 3-3 4-6 5-7 6-8
Ein Mann repariert sein Motorrad in der Garage . | A man is repairing his motorcycle in the garage . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9
Die Läufer haben das Ziel fast erreicht . | The runners have almost reached the finish line . | 0-0 1-1 2-2 3-5 4-6 4-7 5-3 6-4 7-8
Eine Frau mit einem Kinderwagen überquert die Straße . | A woman with a stroller is crossing the street . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9
Ein brauner Hund jagt am Ufer einen weißen Vogel . | A brown dog is chasing a white bird along the shore . | 0-0 1-1 2-2 3p3 3-4 4-8 4-9 5-10 6-5 7-6 8-7 9-11
Vier Freunde essen an einem runden Tisch Pizza . | Four friends are eating pizza at a round table . | 0-0 1-1 2p2 2-3 3-5 4-6 5-7 6-8 7-4 8-9
Der Junge , der den Drachen hält , lacht . | The boy who is holding the kite is laughing . | 0-0 1-1 3-2 4-5 5-6 6p3 6-4 8p7 8-8 9-9
Ein Angler in hohen Stiefeln steht mitten im Fluss . | A fisherman in tall boots stands in the middle of the river . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6p7 6-8 7p9 7-10 8-11 9-12
"""  # noqa: E501


@dataclass(frozen=True)
class AlignedPair:
    """A caption in both languages, as words, with the links between them made by hand.

    A link is (German position, English position). `sure` are links that everyone would make;
    `possible` holds those and the debatable ones.
    """

    german: tuple[str, ...]
    english: tuple[str, ...]
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]

    @property
    def texts(self) -> tuple[str, str]:
        """Both captions as plain text, German first."""
        texts = (" ".join(words) for words in (self.german, self.english))
        return tuple(re.sub(r" ([.,])", r"\1", text) for text in texts)


def aligned_pairs(text: str = CAPTIONS) -> list[AlignedPair]:
    """The pairs of a text like `CAPTIONS`. Raises ValueError for a link that leads nowhere."""
    pairs = []
    for line in text.strip().splitlines():
        german, english, links = (part.split() for part in line.split(" | "))
        matches = [re.fullmatch(r"(\d+)([-p])(\d+)", link) for link in links]
        if not all(matches):
            raise ValueError(f"not a link, such as 3-2 or 3p2, in {line!r}")
        sure = {(int(m[1]), int(m[3])) for m in matches if m[2] == "-"}
        possible = {(int(m[1]), int(m[3])) for m in matches}
        if not all(i < len(german) and j < len(english) for i, j in possible):
            raise ValueError(f"a position beyond the sentence in {line!r}")
        pairs.append(
            AlignedPair(tuple(german), tuple(english), frozenset(sure), frozenset(possible))
        )
    return pairs
